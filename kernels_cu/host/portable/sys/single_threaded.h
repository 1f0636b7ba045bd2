// Replaces glibc's header, whose variable exists only from 2.32 on: reference counts of the C++
// library are then always atomic.
#pragma once

constexpr bool __libc_single_threaded = false;
