"""Cannot be imported."""

import no_such_package_of_anyone  # noqa: F401
