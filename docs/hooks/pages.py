"""Hooks of MkDocs: pages and pictures that lie elsewhere in the repository, so that nothing is written twice.

- The notebooks of `notebooks/` are pages under `notebooks/`.
- `<!-- include: FILE -->` in a page is replaced by that file without its title, and `<!-- include: FILE # HEADING -->`
  by one section of it.
- A picture of `examples/` that a page or an included file shows comes with it.
"""

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[2]

_INCLUDE = re.compile(
    r"^<!-- include: (?P<file>\S+)(?: # (?P<heading>.+?))? -->$", re.MULTILINE
)
_PICTURE = re.compile(r"(!\[[^\]]*\])\((?:\.\./)*(?P<file>examples/[\w/]+\.png)\)")
_FORMULAS = re.compile(
    r"<script[^>]*\bsrc=\"https?://[^>]*></script>|<script type=\"module\">.*?</script>",
    re.DOTALL,
)
_OTHER_HOST = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^>]*>|<link\b[^>]*stylesheet[^>]*//[^>]*>"
)


@event_priority(100)  # before the plugin that makes pages of notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the notebooks and the pictures of included files."""
    pages = [
        pathlib.Path(file.abs_src_path).read_text()
        for file in files.documentation_pages()
        if file.abs_src_path
    ]
    included = [
        (ROOT / match["file"]).read_text()
        for text in pages
        for match in _INCLUDE.finditer(text)
    ]
    pictures = sorted(
        {
            match["file"]
            for text in pages + included
            for match in _PICTURE.finditer(text)
        }
    )
    notebooks = sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "notebooks").glob("*.ipynb")
    )
    for name in [*notebooks, *pictures]:
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Includes what is asked for."""
    up = "../" * page.file.src_uri.count("/")
    markdown = _INCLUDE.sub(lambda match: _included(match, up), markdown)
    return _PICTURE.sub(
        lambda picture: f"{picture[1]}({up}{picture['file']})", markdown
    )


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Takes the scripts for formulas and diagrams out of notebooks, which have none; no page asks another host."""
    output = (
        _FORMULAS.sub("", output) if page.file.src_uri.endswith(".ipynb") else output
    )
    if asking := _OTHER_HOST.search(output):
        raise PluginError(
            f"`{page.file.src_uri}` would ask another host: {asking[0][:200]}"
        )
    return output


def _included(match: re.Match[str], up: str) -> str:
    text = (ROOT / match["file"]).read_text()
    if match["heading"] is None:
        text = re.sub(r"\A# .*\n", "", text)
    else:
        section = re.search(
            rf"^## {re.escape(match['heading'])}\n(.*?)(?=^## |\Z)",
            text,
            re.MULTILINE | re.DOTALL,
        )
        if section is None:
            raise PluginError(
                f"`{match['file']}` has no section {match['heading']!r}, which a page includes."
            )
        text = section[1]
    return re.sub(r"\]\((\.\./)?docs/", f"]({up}", text)
