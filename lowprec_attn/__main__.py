"""`python -m lowprec_attn`: the command `lowprec-attn`."""

import sys

from lowprec_attn.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
