// Python, in a thread of its own: a question in, an answer out.
import { loadPyodide } from "./python/pyodide.mjs";

const at = (name) => new URL(`./python/${name}`, import.meta.url);

async function start() {
  const python = await loadPyodide({ indexURL: at("").href });
  const packed = await fetch(at("dsv4.zip"));
  python.unpackArchive(await packed.arrayBuffer(), "zip");
  const page = python.pyimport("dsv4.planning.page");
  postMessage({ choices: JSON.parse(page.choices()) });
  return page;
}

const started = start();
started.catch((error) => postMessage({ failed: String(error) }));
onmessage = async ({ data }) => {
  const page = await started;
  try {
    postMessage({ question: data, answer: JSON.parse(page.ask(JSON.stringify(data))) });
  } catch (error) {
    postMessage({ failed: String(error) });
  }
};
