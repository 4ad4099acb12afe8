"""Problems, checks and targets for the compiled GPU kernels, with or without a device."""
