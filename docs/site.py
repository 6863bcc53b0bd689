"""What MkDocs does not know: the project's address, pages outside docs/, links to other files."""

import os
import re
import tomllib
from pathlib import Path, PurePosixPath

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Pages of the site that are files of the repository outside docs/.
ELSEWHERE = {
    "recipes.md": "recipes/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "shipped-rules.md": "src/celo2/pretrained/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The addresses, which only pyproject.toml knows."""
    config.site_url = PROJECT["urls"]["Documentation"]
    config.repo_url = PROJECT["urls"]["Source"]
    config.repo_name = f"{PROJECT['name']} {PROJECT['version']}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of docs/ and those kept elsewhere."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_) -> str:
    """The page with links that hold on the site: to pages, or to files of the repository."""
    address = page.file.src_uri
    source = PurePosixPath(ELSEWHERE.get(address, f"docs/{address}"))
    pages = {path: name for name, path in ELSEWHERE.items()}
    pages |= {f"docs/{file.src_uri}": file.src_uri for file in files if not file.generated_by}

    def replace(link: re.Match) -> str:
        target = os.path.normpath(source.parent / link[2])
        if target in pages:
            return link[1] + os.path.relpath(pages[target], PurePosixPath(address).parent)
        if not (ROOT / target).exists():
            raise ValueError(f"{source} links to {link[2]}, which is not in the repository.")
        return f"{link[1]}{PROJECT['urls']['Source']}/blob/v{PROJECT['version']}/{target}"

    return LINK.sub(replace, markdown)


class NamedTuples(griffe.Extension):
    """Gives each NamedTuple the signature that its fields make, as griffe does for dataclasses."""

    def on_class(self, *, cls: griffe.Class, **_) -> None:
        if "NamedTuple" not in map(str, cls.bases) or "__init__" in cls.members:
            return
        fields = [
            griffe.Parameter(
                field.name,
                annotation=field.annotation,
                kind=griffe.ParameterKind.positional_or_keyword,
                default=field.value,
            )
            for field in cls.attributes.values()
            if field.annotation is not None and "property" not in field.labels
        ]
        cls.set_member(
            "__init__", griffe.Function("__init__", parameters=griffe.Parameters(*fields))
        )
