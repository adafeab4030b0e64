//! `#[derive(Classed)]` for the settings of a training run: each field states its class; a field
//! without one does not compile.
//!
//! ```text
//! #[setting(CLASS)]                       what a resumed run may do with it
//! #[setting(CLASS, may_differ)]           ranks may have different values
//! #[setting(CLASS, recipe)]               a drafter's card shows it
//! #[setting(flatten)]                     a struct of settings, whose keys stand among these
//! ```
//!
//! CLASS is `free`, `lasting`, `told` or `compared`, as `dflash_settings::Resume` explains them.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Error, Field, Fields, Ident, Path, parse_macro_input};

/// Implements `dflash_settings::Classed`.
#[proc_macro_derive(Classed, attributes(setting))]
pub fn classed(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    implementation(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn implementation(input: &DeriveInput) -> syn::Result<TokenStream> {
    let (name, Data::Struct(data)) = (&input.ident, &input.data) else {
        return Err(Error::new_spanned(&input.ident, "settings are a struct"));
    };
    let Fields::Named(fields) = &data.fields else {
        return Err(Error::new_spanned(name, "settings have names"));
    };
    let fields = fields.named.iter().map(entry).collect::<syn::Result<Vec<_>>>()?;
    Ok(quote! {
        impl crate::class::Classed for #name {
            fn settings() -> Vec<crate::class::Setting> {
                let mut all = Vec::new();
                #(#fields)*
                all
            }
        }
    })
}

/// The code that adds a field to `all`.
fn entry(field: &Field) -> syn::Result<TokenStream> {
    let (name, kind) = (field.ident.as_ref().expect("named"), &field.ty);
    let Some(attribute) = field.attrs.iter().find(|it| it.path().is_ident("setting")) else {
        let reason = "says nothing of resumed runs: add #[setting(compared)] or another class";
        return Err(Error::new_spanned(name, reason));
    };
    let mut words: Vec<Ident> = Vec::new();
    attribute.parse_nested_meta(|meta| {
        words.push(meta.path.require_ident()?.clone());
        Ok(())
    })?;
    let (class, more) = words.split_first().expect("the parser wants one");
    if class == "flatten" && more.is_empty() {
        return Ok(quote! { all.extend(<#kind as crate::class::Classed>::settings()); });
    }
    let class: Path = match class.to_string().as_str() {
        "free" => syn::parse_quote!(crate::class::Resume::Free),
        "lasting" => syn::parse_quote!(crate::class::Resume::Lasting),
        "told" => syn::parse_quote!(crate::class::Resume::Told),
        "compared" => syn::parse_quote!(crate::class::Resume::Compared),
        _ => {
            let reason = "the first word is free, lasting, told, compared or flatten";
            return Err(Error::new_spanned(class, reason));
        }
    };
    let strange = more.iter().find(|word| *word != "may_differ" && *word != "recipe");
    if let Some(strange) = strange {
        return Err(Error::new_spanned(strange, "behind the class stand may_differ and recipe"));
    }
    let has = |word: &str| more.iter().any(|it| it == word);
    let (may_differ, in_recipe) = (has("may_differ"), has("recipe"));
    let key = name.to_string();
    Ok(quote! {
        all.push(crate::class::Setting { key: #key, resume: #class, may_differ: #may_differ, in_recipe: #in_recipe });
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(source: &str) -> String {
        implementation(&syn::parse_str(source).unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn a_field_without_a_class_does_not_compile() {
        let bare = fault("struct S { #[setting(free)] a: u8, b: u8 }");
        assert!(bare.contains("says nothing of resumed runs"), "{bare}");
        let strange = fault("struct S { #[setting(frei)] a: u8 }");
        assert!(strange.contains("free, lasting, told, compared"), "{strange}");
        let strange = fault("struct S { #[setting(free, recipes)] a: u8 }");
        assert!(strange.contains("may_differ and recipe"), "{strange}");
        assert!(fault("struct S { #[setting] a: u8 }").contains("setting(...)"), "no list");
        assert!(fault("struct S(u8);").contains("have names"));
    }

    #[test]
    fn classes_and_flattened_structs_are_listed_in_order() {
        let source = "struct S { #[setting(told, recipe)] a: u8, #[setting(flatten)] more: More }";
        let made = implementation(&syn::parse_str(source).unwrap()).unwrap().to_string();
        let a = made.find("\"a\"").unwrap();
        let told = made.find("Resume :: Told").unwrap();
        assert!(a < told && told < made.find("< More as").unwrap(), "{made}");
        assert!(made.contains("may_differ : false , in_recipe : true"), "{made}");
    }
}
