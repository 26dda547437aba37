"""How many requests a number of GPUs serves, weights and all: `deploy` in deployment.py.

    gpus         "4x80GB", "8xH200": what there is
    weights      bytes of a checkpoint, derived from its config, and each rank's share
    workspace    what a manager has on a GPU in addition to the cache, without having that GPU
    layouts      tensor, expert and pipeline parallelism: what is divided, what is replicated
    deployment   the answer
    peers        what vLLM and SGLang keep for the same
    question     a model's name and GPUs in words, as the command and the page take them
    words        the answer as a sentence, and what it is of
    page         what the page of the docs asks

None of it needs torch or numpy: it also runs in the page of the planner, in a browser.
"""
