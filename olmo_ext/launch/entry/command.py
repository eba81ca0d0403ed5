"""Started by path from the batch shell: an olmo-ext command inside a job."""

import runpy

if __name__ == "__main__":
    runpy.run_module("olmo_ext", run_name="__main__", alter_sys=True)
