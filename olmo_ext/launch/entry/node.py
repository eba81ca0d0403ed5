"""Started by path from the batch shell: what srun starts on every node."""

import sys

from olmo_ext.launch.node_agent import main

if __name__ == "__main__":
    sys.exit(main())
