"""Entry point of `python -m lmdeploy`."""

import sys

from lmdeploy.cli.main import main

sys.exit(main())
