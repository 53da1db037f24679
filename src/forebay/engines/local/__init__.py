"""The engine inside the process: any transformers decoder on this machine."""
