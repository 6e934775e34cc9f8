"""The experiments of the paper, made with the library that users call: `tailavg reproduce`."""
