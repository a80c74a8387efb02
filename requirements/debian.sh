#!/bin/sh
# Programs that tests use and pip cannot bring. Without them the tests that need them are skipped.
set -eu
missing=""
command -v espeak-ng >/dev/null || missing="$missing espeak-ng"
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing="$missing prometheus"
command -v nginx >/dev/null || missing="$missing nginx-light"
command -v chromium >/dev/null || missing="$missing chromium"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # shellcheck disable=SC2086 # several names
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $missing; } \
        >/dev/null && exit 0
fi
echo "note: not installed:$missing (apt-get install$missing); tests that use them are skipped" >&2
