"""The command line as `python -m knnstore`, for an environment whose programs are not on the PATH."""

from knnstore.cli import main

if __name__ == "__main__":
    main()
