"""`python -m lowprec_attn`: the command `lowprec-attn`."""

from lowprec_attn.commands.main import run_process

if __name__ == "__main__":
    run_process()
