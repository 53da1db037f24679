"""``python -m forebay``, as ``torchrun -m forebay`` starts it: the ``forebay`` command."""

from forebay.cli import main

if __name__ == "__main__":
    main()
