"Everything about the package stands in settings.ini; this file only hands it to setuptools."
from configparser import ConfigParser
from pathlib import Path

import setuptools

cp = ConfigParser(delimiters=["="])
cp.read("settings.ini", encoding="utf-8")
cfg = cp["DEFAULT"]


def words(key):
    "The requirements listed under `key`, one word each."
    return cfg.get(key, "").split()


extras = {k.removesuffix("_requirements").replace("_", "-"): words(k) for k in cfg if k.endswith("_requirements")}
extras["all"] = sorted({r for k, rs in extras.items() if k not in ("dev", "docs", "quarto") for r in rs})
lib = cfg["lib_path"]
# nbs/ and results/ travel in the wheel, so that `icl26 list` and `icl26 reproduce` work without a checkout
data = {f"{lib}.notebooks": cfg["nbs_path"], f"{lib}.results_data": "results"}
data = {package: folder for package, folder in data.items() if Path(folder).is_dir()}

setuptools.setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Natural Language :: English",
        "Programming Language :: Python :: 3",
    ],
    python_requires=">=" + cfg["min_python"],
    packages=setuptools.find_packages(include=[lib, f"{lib}.*"]) + list(data),
    package_dir=data,
    package_data={lib: ["py.typed"]} | {package: ["*.ipynb", "**/*.ipynb", "**/*.json"] for package in data},
    install_requires=words("requirements"),
    extras_require=extras,
    zip_safe=False,
    entry_points={
        "console_scripts": [s.strip() for s in cfg["console_scripts"].splitlines() if s.strip()],
        "nbdev": [f"{lib}={lib}._modidx:d"],
    },
)
