// The shim of wheels: what newer versions of libstdc++ export is made here, so that old ones do.
#if defined(__x86_64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");  // which headers of torch 2.15 call
#elif defined(__aarch64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif

#include "host/shim.cpp"

#include <new>
#include <sstream>

template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }
