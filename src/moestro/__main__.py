"""`python -m moestro` is the `moestro` command."""

import sys

from moestro.cli.main import main

sys.exit(main())
