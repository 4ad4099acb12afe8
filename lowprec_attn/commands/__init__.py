"""The commands, one file each: it reads flags, calls the library and prints.

`main` imports a command's module when it is asked for; each has `add_arguments(parser)` and
`run(args)`. `config` alone, with the configs themselves, knows ml_collections.
"""
