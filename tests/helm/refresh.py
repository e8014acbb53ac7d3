"""`python -m tests.helm.refresh`: the chart's schema and the golden files, as code and templates now have them."""

from tests.helm.golden import GOLDEN, golden
from tests.helm.settings import SCHEMA, schema_with_settings


def main() -> None:
    SCHEMA.write_text(schema_with_settings())
    for case in GOLDEN:
        GOLDEN[case].write_text(golden(case))


if __name__ == "__main__":
    main()
