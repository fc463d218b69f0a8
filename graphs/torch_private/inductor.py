"""Private names of Inductor, which takes a second to import."""

from torch._inductor.compile_fx import compile_fx  # compiles what Dynamo captured, by a partitioner of our own
from torch._inductor.custom_graph_pass import CustomPartitionerFn  # the class that such a partitioner must have
from torch._inductor.utils import is_cudagraph_unsafe_fx_node  # what no CUDA graph can hold
