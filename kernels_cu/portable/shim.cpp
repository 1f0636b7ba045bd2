// The shim of wheels: what newer versions of libstdc++ export is made here, so that old ones do.
#include "../shim.cpp"

#include <new>
#include <sstream>

template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }
