// The shim as built for wheels: defines what only newer versions of libstdc++ export, so that it
// loads with old ones.
#if defined(__x86_64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");  // headers of torch 2.15 call dlsym
#elif defined(__aarch64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif

#include "host/shim.cpp"

#include <new>
#include <sstream>

template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }
