"""`python -m moetune`: the command line."""

from moetune.cli.main import main

if __name__ == "__main__":
    main()
