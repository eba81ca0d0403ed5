"""Started by path from the batch shell: an olmo-ext command inside a job."""

from olmo_ext.cli import main

if __name__ == "__main__":
    main()
