"""`python -m flexmod bench --suite masks`, with further arguments as given."""

from __future__ import annotations

import sys

from flexmod.__main__ import main

sys.exit(main(["bench", "--suite", "masks", *sys.argv[1:]]))
