"""`python -m executor.cli`."""

from executor.cli import main

if __name__ == "__main__":
    main()
