"""The command line. Heavy imports happen inside the subcommands that need them."""
