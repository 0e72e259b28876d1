"""``python -m hvdtrain``: the same as the console script."""

import sys

try:
    from hvdtrain.cli.main import main
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    main()
