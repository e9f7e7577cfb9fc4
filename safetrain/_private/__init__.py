"""The only package that uses undocumented behaviour: private names of torch, settings of the C library, DataLoader
internals.

feature.py     what a feature is: what it relies on, a probe, what is lost without it, what happens instead
table.py       all of them; `safetrain env` prints it, SAFETRAIN_WITHOUT=name,… turns some off
autograd.py    the trace of every operation, forward and backward
compiler.py    torch.compile: the module inside, and the precision of compiled backward passes
ddp.py         DistributedDataParallel: buffers, and the exchange of gradients of a rank that failed
dtensor.py     which part of a sharded tensor this process has
elastic.py     the launcher behind --nproc
foreach.py     one call for many tensors
fused.py       fused optimizers that skip an update on the device
modules.py     torch's own base classes, and which buffers are saved
storage.py     identity of memory, values of a sparse tensor
dataloader.py  a DataLoader without its worker processes
allocator.py   memory that a step frees, kept for the next one
aliases.py     earlier import paths of public modules

Nothing outside this package touches such names. Each feature has a fallback, or is refused with a UsageError before training
starts.
"""
