"""`python -m tests.cli.flags` prints the list that flags.golden keeps."""

import sys

from moestro.cli.reference import flag_list

if __name__ == "__main__":
    sys.stdout.write(flag_list())
