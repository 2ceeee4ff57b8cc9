"""python -m daebm"""

from daebm.cli import main

main()
