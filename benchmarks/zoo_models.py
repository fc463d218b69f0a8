"""The models of the zoo, at sizes for a GPU such as the H200, whose roofline models their times."""

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
