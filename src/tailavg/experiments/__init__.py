"""The experiments of the paper, run with the public library: `tailavg reproduce`."""
