"""``python -m examples.demo``."""

import sys

from examples.demo.run import main

sys.exit(main(sys.argv[1:]))
