"""What the site needs besides MkDocs: files from outside of ``docs/``, notebooks as pages, MathML, words for the search."""

import json
import os
import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Of the repository, what pages link to. It is in the site where it is in the repository: results/solve/table.md there too.
_SHOWN = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/instances/*.md",
    "benchmarks/instances/*.py",
    "examples/*.py",
    "results/**/*.md",
    "results/**/*.png",
)
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(?=[)#])")
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_LANGUAGES = {".py": "python"}
# What people search for, by the page that answers it: the search finds these words there first.
SYNONYMS = {
    "budget.md": ("how much memory", "VRAM"),
    "guides/checkpoint.md": ("gradient checkpointing", "activation checkpointing", "rematerialization"),
    "guides/distributed.md": ("DDP", "FSDP", "multi-GPU"),
    "guides/eager.md": ("dynamic graph", "DTR", "mixture of experts"),
    "guides/huggingface.md": ("huggingface", "Transformers", "Trainer"),
    "guides/logging.md": ("W&B", "wandb", "tensorboard"),
    "guides/lora.md": ("LoRA", "PEFT", "fine-tuning", "QLoRA"),
    "guides/offload.md": ("CPU offload", "save_on_cpu"),
    "guides/training-loop.md": ("bf16", "fp16", "AMP", "mixed precision", "GradScaler", "EMA", "GAN"),
    "guides/troubleshooting.md": ("OOM", "CUDA out of memory"),
    "guides/varying-sizes.md": ("dynamic shapes", "variable length"),
    "options/compression.md": ("quantized activations",),
    "reserved.md": ("fragmentation", "caching allocator"),
}
# How much what a page says counts in the search: guides before concepts, and results and scripts last.
_BOOSTS = {"guides": 2.0, "results": 0.1, "examples": 0.1, "benchmarks": 0.1, "CHANGELOG.md": 0.1}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that are shown, scripts and notebooks as pages."""
    for path in sorted(path for pattern in _SHOWN for path in ROOT.glob(pattern)):
        uri = path.relative_to(ROOT).as_posix()
        if path.suffix in _LANGUAGES:
            fenced = f"# {path.name}\n\n```{_LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
            files.append(File.generated(config, f"{uri}.md", content=fenced))
        else:
            files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        page = notebook_page(json.loads(Path(str(notebook.abs_src_path)).read_text()))
        files.append(File.generated(config, notebook.src_uri.replace(".ipynb", ".md"), content=page))
    return files


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its text, its code, and what that printed and drew."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(f"![figure](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})")
            elif text := "".join(data["text/plain"]).rstrip():  # progress leaves nothing behind
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside of ``docs/``, and to notebooks, to where these are in the site; tell the search about it."""
    docs = Path(config.docs_dir)
    uri = Path(page.file.src_uri)
    page.meta["search"] = {"boost": _BOOSTS.get(uri.parts[0], 1.0)}
    page.meta["tags"] = list(SYNONYMS.get(uri.as_posix(), ()))
    written = page.file.abs_src_path  # None of what is generated, which is named as what it is made of
    folder = (docs / uri).parent if written is None and uri.parts[0] == "notebooks" else Path(written or ROOT / uri).parent

    def link(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if not target.is_file():
            return found[1]  # MkDocs says so
        shown = target.relative_to(docs if target.is_relative_to(docs) else ROOT).as_posix()
        if target.suffix in _LANGUAGES:
            shown += ".md"
        return os.path.relpath(shown.replace(".ipynb", ".md"), uri.parent)

    titled = markdown if markdown.startswith("#") else f"# {uri.parent}\n\n{markdown}"  # results have no heading
    return _LINK.sub(link, titled)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn LaTeX into MathML, which browsers draw by themselves."""

    def mathml(found: re.Match[str]) -> str:
        latex = unescape(found[2]).strip().replace("{aligned}", "{align*}")  # which the converter calls so
        return convert(latex, display="block" if found[1] == "div" else "inline")

    return _MATH.sub(mathml, html)
