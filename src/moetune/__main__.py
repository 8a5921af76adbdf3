"""`python -m moetune`: the command line."""

from moetune.cli.main import main

main()
