"""`python -m minideepinfer`: the `mdi` command, for launchers that start modules, like torchrun."""

from minideepinfer.cli import main

if __name__ == "__main__":
    main()
