"""Records of runs that nobody made, as today's and earlier versions write them."""
