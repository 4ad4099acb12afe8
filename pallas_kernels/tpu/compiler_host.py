"""The environment of a process that compiles for TPUs on a host that has none."""

# libtpu reads these when it is loaded. Nothing must ask for the surroundings of a TPU, and no other
# process with libtpu is in the way.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
