"""`python -m olmo_ext` is `olmo-ext`."""

from olmo_ext.cli import main

main()
