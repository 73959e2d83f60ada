"""`python -m kvcoord`: the same as the command `kvcoord`."""

from kvcoord.cli import main

if __name__ == "__main__":
    main()
