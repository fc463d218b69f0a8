"""The models of the zoo, at sizes for a GPU such as the H200, whose roofline models their times, and for a CPU."""

from functools import partial

from planner.capture.workload.models import build

MODELS = {
    "unet": "zoo:unet,batch=8",
    "resnet18": "zoo:resnet18,batch=256",
    "resnet50": "zoo:resnet50,batch=128",
    "resnet152": "zoo:resnet152,batch=64",
    "vgg16": "zoo:vgg16,batch=64",
    "vgg19": "zoo:vgg19,batch=64",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=128",
    "densenet121": "zoo:densenet121,batch=64",
    "gpt2": "zoo:gpt2,layers=12,width=768,heads=12,batch=8,dropout=0,dtype=bfloat16",
    "gpt2-medium": "zoo:gpt2,layers=24,width=1024,heads=16,batch=8,dropout=0,dtype=bfloat16",
    "llama": "zoo:llama,batch=4,dtype=bfloat16",
    "vit": "zoo:vit,batch=64,dtype=bfloat16",
    "mlp": "zoo:mlp,batch=8192",
}
# Those of results/compare/cpu, and the convolutional ones at sizes whose ops take longer.
CPU_MODELS = {
    "gpt2": partial(build, "gpt2", layers=12, width=64, heads=4, vocab=500, batch=8, seq=128, dropout=0),
    "vit": partial(build, "vit", layers=12, width=64, heads=4, size=64, patch=8, classes=10, batch=8),
    "unet": partial(build, "unet", channels=8, size=96, batch=4),
    "resnet50": partial(build, "resnet50", width=8, size=64, classes=10, batch=16),
    "resnet50-wide": partial(build, "resnet50", width=16, size=64, classes=10, batch=16),
    "mobilenet_v2": partial(build, "mobilenet_v2", multiplier=0.25, size=64, classes=10, batch=16, dropout=0),
    "mobilenet_v2-wide": partial(build, "mobilenet_v2", multiplier=0.5, size=96, classes=10, batch=16, dropout=0),
}
