"""`vllm bench serve`, unmodified, with the arguments of this command.

Its module is run, not the command `vllm`: that asks for the version of a package that has another name without CUDA.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
