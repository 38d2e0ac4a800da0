"""`python -m tvm_axe` is `tvm-axe`."""

from tvm_axe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
