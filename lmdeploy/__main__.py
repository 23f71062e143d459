"""`python -m lmdeploy`."""

import sys

from lmdeploy.cli.entrypoint import main

sys.exit(main())
