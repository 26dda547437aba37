"""The server of `dsv4 serve`. Needs the extra `dsv4[serve]`."""
