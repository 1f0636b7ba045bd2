// In place of glibc's, whose variable is of 2.32: C++ libraries then count references atomically.
#pragma once

constexpr bool __libc_single_threaded = false;
