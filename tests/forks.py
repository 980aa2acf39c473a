"""Processes of tests, forked from one fork server that has imported what most of them need."""

import multiprocessing as mp
from multiprocessing import forkserver

import torch.multiprocessing


def context():
    """Of `multiprocessing`; its fork server runs."""
    mp.set_forkserver_preload(["kvflow.launch.processes"])
    forkserver.ensure_running()
    return mp.get_context("forkserver")


def run(main, args, num):
    """Runs ``main(rank, *args)`` in so many processes; raises the first one's error."""
    context()
    torch.multiprocessing.start_processes(main, args, num, start_method="forkserver")
