"""`python -m tests.helm.refresh`: renders the golden files again. Review the difference."""

from tests.helm.golden import GOLDEN, golden


def main() -> None:
    for case in GOLDEN:
        GOLDEN[case].write_text(golden(case))


if __name__ == "__main__":
    main()
