"""The commands. Each has one module, which reads flags, calls the library and prints.

Every command's module has `add_arguments(parser)` and `run(args)`. `main` imports it only when the
user asks for that command. Only `config` and the configs themselves use ml_collections.
"""
