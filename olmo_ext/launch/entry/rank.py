"""Started by path from the batch shell: what torchrun starts for every rank."""

import sys

from olmo_ext.launch.rank import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
