"""``python -m hvdtrain``: the same as the console script."""

from hvdtrain.cli.main import main

if __name__ == "__main__":
    main()
