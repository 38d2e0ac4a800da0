"""What setup.cfg can't say: the databases lie at the top level, and in the package once it is installed."""

from setuptools import find_packages, setup

RECORDS = "tvm_axe.tuning_logs"

setup(
    packages=[*find_packages(include=["tvm_axe*"]), RECORDS],
    package_dir={RECORDS: "tuning_logs"},
    package_data={"tvm_axe": ["py.typed", "stream/data/**/*"], RECORDS: ["*/*/*.json"]},
)
